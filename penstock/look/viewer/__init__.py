"""The viewer: a local web application for one dataset, or two to compare. Needs the extra `penstock[look]`."""
