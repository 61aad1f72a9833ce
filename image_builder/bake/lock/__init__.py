"""The exact bytes of a build: what apt and registries resolve, how it is downloaded and written down."""
