"""SGLang: its server driven by its own HTTP API, and the routes out of its answers."""
