"""The parts that all commands share: options, output, progress and the stores that they open."""
