"""The stage ``control_plane_build``."""
