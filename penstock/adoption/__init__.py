"""The way in for data that is tokenized already: `adopt` makes it a dataset like any other."""
