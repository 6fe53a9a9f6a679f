"""Pictures of prepared data: terminal, report, viewer, diff and notebook HTML, all from the same statistics."""
