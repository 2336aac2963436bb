"""Questions: files and data sets, the forms of prompt they are put in, and runs of answers that resume."""
