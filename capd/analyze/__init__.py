"""Pure numbers: functions on statistics and elements of records, without files and stores."""
