// Layout of a record's header (src/plan/routing_record.rs) and of what is kept of records (src/plan/deferred_errors.rs), in
// words of 8 bytes.
#pragma once

enum RecordLayout : int { HEADER_WORDS = 26, HEADER_BYTES = 512, KIND = 0, TOKENS = 1, BACKWARD = 2, BAD = 4, FIELD = 9, PENDING = 23, BAD_LAYER = 24 };
enum ErrorsLayout : int { ERRORS_FIRST_BAD = 4, ERRORS_BLOCKS_DONE = 5, ERRORS_LAYER = 6, ERRORS_WORDS = 8 };
enum ErrorsKind : unsigned long long { ERRORS_RECORDS = 1, ERRORS_CAPACITY = 2 };
