"""The viewer: a local web page over one dataset, or two. Needs the extra `penstock[look]`."""
