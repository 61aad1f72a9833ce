"""An image in an Azure Compute Gallery: uploaded, made a version, replicated, put into use and withdrawn."""
