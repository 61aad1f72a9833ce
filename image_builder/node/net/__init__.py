"""The node's network: HTTP requests, retries, the metadata service, the API server, and an HTTP server of its own."""
