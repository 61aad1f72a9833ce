"""An image in an Azure Compute Gallery: uploaded, made a version, replicated, taken into use and out of it."""
