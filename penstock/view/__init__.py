"""What a dataset looks like at load time: loss policy, length limit, hold-out and mixtures; nothing is re-encoded."""
