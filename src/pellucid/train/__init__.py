"""Training: what a network is asked, on which data, and by whom."""
