"""One module per format, each with a `FORMAT`; its name is the `--to`."""
