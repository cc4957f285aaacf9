"""Who may pass: one suite a stage over summary tables, thresholds as data, the verdict."""
