"""Stand-ins for other people's servers, written from their public documentation."""
