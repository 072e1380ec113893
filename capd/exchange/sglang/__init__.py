"""The files of sglang's dumper, which its comparator opens: written from records, and read into a run."""
