"""The exact bytes of a build: how apt and registries resolve them, and how they are downloaded and recorded."""
