// Layout of a record's header (src/ep/routing_record.rs) and of what is kept of records (src/ep/deferred_errors.rs), in words of 8 bytes.
#pragma once

enum RecordLayout : int { HEADER_WORDS = 26, HEADER_BYTES = 512, KIND = 0, TOKENS = 1, BACKWARD = 2, BAD = 4, FIELD = 9, PENDING = 23 };
enum HeardLayout : int { HEARD_FIRST_BAD = 4, HEARD_TICKET = 5, HEARD_WORDS = 8 };
enum HeardKind : unsigned long long { HEARD_RECORDS = 1, HEARD_CAPACITY = 2 };
