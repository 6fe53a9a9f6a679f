"""Where rows come from: files, folders and hub datasets, cut into slices by content."""
