"""The route store: a materialised view of the routes topic in LMDB, answering over HTTP (extra `store`)."""

from moebus.consumers.store.answers import Answer, Question
from moebus.consumers.store.http import store_routes
from moebus.consumers.store.options import StoreOptions
from moebus.consumers.store.store import RouteStore

__all__ = ["Answer", "Question", "RouteStore", "StoreOptions", "store_routes"]
