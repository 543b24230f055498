"""The command line: `fleetfoot generate`, `chat`, `bench`."""
