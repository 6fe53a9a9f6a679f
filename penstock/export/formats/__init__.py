"""One module per export format. The module's name is the value of `--to`; its `FORMAT` implements `ExportFormat`."""
