"""Questions: files and data sets, their paraphrases, and the forms of prompt they are put in."""
