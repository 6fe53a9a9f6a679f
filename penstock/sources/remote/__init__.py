"""Sources by URL: objects in stores, on web servers and on the Hugging Face Hub, read by range requests."""
