"""Floor 7: folders that other engines load, their readers, the golden round."""
