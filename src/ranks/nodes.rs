//! Slurm's compressed lists of hosts.

/// The first host of a list such as `gpu[03-07,12],login1`: the one that a step's rank 0 runs on, unless the step
/// was given an arbitrary distribution. `None` if this is no list.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let at = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        let (plain, tail) = rest.split_at(at);
        host.push_str(plain);
        let Some(inside) = tail.strip_prefix('[') else {
            let ends = !tail.starts_with(']') && is_name(&host);
            return ends.then_some(host);
        };
        let (ranges, after) = inside.split_once(']')?;
        let first = ranges.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
}

fn is_name(host: &str) -> bool {
    let first = host.bytes().next();
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    first.is_some_and(|b| b.is_ascii_alphanumeric()) && host.len() <= 253 && host.bytes().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        for (list, host) in [
            ("vm", "vm"),
            ("node-1.cluster,node-2.cluster", "node-1.cluster"),
            ("gpu[03-07,12],login1", "gpu03"),
            ("gpu[12,3-7]", "gpu12"),
            ("rack[1-2]node[08-09]-ib", "rack1node08-ib"),
            ("n[1]", "n1"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for bad in ["", ",", "[", "]", "a[", "a]", "a[]", "a[-3]", "a[x]", "a[1", "-a", "a b", "(null)", "é[1]"] {
            assert_eq!(first_host(bad), None, "{bad}");
        }
    }
}
