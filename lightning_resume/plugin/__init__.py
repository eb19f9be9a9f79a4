"""Everything that knows Lightning."""
