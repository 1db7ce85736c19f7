"""Where results lie: what the project publishes, and what a user makes. No torch here."""

RUNS = "results/runs"  # run folders; not under version control
LOCAL = "results/local"  # tables and figures of one's own; not under version control
PUBLISHED = "results"  # the project's pages, which --record writes
