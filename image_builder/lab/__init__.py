"""The lab: a registry, images and a control plane that stand in for a real cluster's."""
