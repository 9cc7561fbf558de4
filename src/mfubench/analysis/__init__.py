"""From the run logs of a study to tables, figures and the report. Nothing here is measured; everything is judged."""
