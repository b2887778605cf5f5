"""Run folders as a whole: merged, split, filtered, imported and verified."""
