"""What is told about a build after it: typed results, their JSON, their tables."""
