"""Pure numbers: functions over statistics and elements of records, without files and stores."""
