"""Data of recipes: rows of many formats become token ids, labels and packed rows."""
