"""What a newcomer runs: manifests, a little data, and the two demonstrations of the quick start."""
