"""Operations on whole run folders: merge, split, filter, import and verify."""
