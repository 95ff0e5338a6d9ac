"""Routes out of the answers of other engines: what their decoders share."""
