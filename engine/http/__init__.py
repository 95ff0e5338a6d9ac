"""What the adapters of HTTP servers share."""
