"""The commands about what happens while a job runs: alerts, rules."""
