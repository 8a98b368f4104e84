"""Serving: requests, pages and their scheduling on the host. The only place with mutable Python objects."""
