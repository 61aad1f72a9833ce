"""The node's network: one HTTP request, the platform's metadata service, the API server, and a server of its own."""
