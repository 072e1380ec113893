"""The live state of a node without any screen: samples of its daemon, and the newest records of its runs."""
