"""The common part of the integrations: loading a model by its settings, call options, records in traces."""
