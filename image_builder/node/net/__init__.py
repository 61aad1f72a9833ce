"""The node's network: one HTTP request, asking again, the metadata service, the API server, a server of its own."""
