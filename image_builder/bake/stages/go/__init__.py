"""The stage kind ``go``: programs in Go."""
