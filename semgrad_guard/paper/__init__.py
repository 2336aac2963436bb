"""Methods compared as the paper does: runs, tables, figures and the report; the probe; the band of a gate."""
