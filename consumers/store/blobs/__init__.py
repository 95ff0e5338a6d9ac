"""Where the bytes of attempts live: one port, several homes."""
