"""Row programs: the instruction list that every kernel applies to its finished rows."""
