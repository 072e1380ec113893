"""The files of Megatron-LM's `--save-activations`, `--save-dgrads` and `--save-wgrads`, read into a run."""
