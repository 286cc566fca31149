//! Groups of a world against their definition: ranks equal in all other coordinates.

use moebius::Error;
use moebius::ranks::{Axis, AxisSize, Mesh};

/// Every way to write `world` as an ordered product of three sizes.
fn factorings(world: usize) -> Vec<[usize; 3]> {
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    divisors(world).flat_map(|a| divisors(world / a).map(move |b| [a, b, world / a / b])).collect()
}

/// Coordinates of every rank, by counting up like digits.
fn count(sizes: [usize; 3]) -> Vec<[usize; 3]> {
    let mut places = Vec::new();
    for a in 0..sizes[0] {
        for b in 0..sizes[1] {
            for c in 0..sizes[2] {
                places.push([a, b, c]);
            }
        }
    }
    places
}

#[test]
fn every_factoring_of_8_and_12() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let mut meshes = 0;
    for axes in [[Axis::Expert, Axis::ExpertShard, Axis::Tensor], [Axis::Expert, Axis::Data, Axis::Tensor]] {
        for (world, order) in [8, 12].into_iter().flat_map(|world| orders.map(|order| (world, order))) {
            for sizes in factorings(world) {
                let named: Vec<AxisSize> = order.iter().zip(sizes).map(|(i, size)| axes[*i].of_size(size)).collect();
                check(world, &named, count(sizes));
                meshes += 1;
            }
        }
    }
    // 10 ordered factorings of 8 in three, 18 of 12.
    assert_eq!(meshes, 2 * 6 * (10 + 18));
}

fn check(world: usize, named: &[AxisSize], places: Vec<[usize; 3]>) {
    let mesh = Mesh::new(world, named).unwrap();
    assert_eq!((mesh.world(), places.len()), (world, world));
    for (at, AxisSize { axis, size }) in named.iter().enumerate() {
        assert_eq!(mesh.size(*axis), *size);
        let groups = mesh.groups(*axis);
        assert_eq!(groups.len() * size, world, "{named:?} {axis}");
        assert!(groups.windows(2).all(|pair| pair[0][0] < pair[1][0]), "{groups:?}");
        for rank in 0..world {
            // The definition.
            let same = |other: &usize| (0..3).all(|i| i == at || places[*other][i] == places[rank][i]);
            let expected: Vec<usize> = (0..world).filter(same).collect();
            let member = mesh.member(*axis, rank).unwrap();
            assert_eq!(member.ranks, expected, "{named:?} {axis} of rank {rank}");
            assert_eq!(member.rank, places[rank][at]);
            assert_eq!(member.ranks[member.rank], rank);
            assert_eq!(groups[member.group], expected);
            assert_eq!(mesh.coordinate(*axis, rank).unwrap(), places[rank][at]);
        }
    }
}

/// Transformer Engine's example: 8 devices, expert groups {0, 2, 4, 6} and {1, 3, 5, 7} beside tensor pairs.
#[test]
fn expert_4_by_tensor_2() {
    let mesh = Mesh::new(8, &[Axis::Expert.of_size(4), Axis::Tensor.of_size(2)]).unwrap();
    assert_eq!(mesh.groups(Axis::Expert), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert_eq!(mesh.groups(Axis::Tensor), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    // An axis that is not there: everybody alone.
    assert_eq!(mesh.groups(Axis::Data), (0..8).map(|rank| vec![rank]).collect::<Vec<_>>());
    let member = mesh.member(Axis::Data, 5).unwrap();
    assert_eq!((member.group, member.rank, member.ranks), (5, 0, vec![5]));
    // One rank, no axes.
    assert_eq!(Mesh::new(1, &[]).unwrap().groups(Axis::Expert), [[0]]);
}

#[test]
fn impossible_meshes() {
    use Axis::{Data, Expert};
    for (world, axes, name) in [
        (0, &[][..], "world"),
        (usize::MAX, &[], "world"),
        (8, &[], "axes"),
        (8, &[Expert.of_size(4)], "axes"),
        (8, &[Expert.of_size(16)], "axes"),
        (8, &[Expert.of_size(usize::MAX), Data.of_size(usize::MAX)], "axes"),
        (8, &[Expert.of_size(8), Data.of_size(0)], "data"),
        (8, &[Expert.of_size(2), Data.of_size(2), Expert.of_size(2)], "expert"),
    ] {
        let Err(Error::Invalid { name: found, .. }) = Mesh::new(world, axes) else { panic!("{world} {axes:?}") };
        assert_eq!(found, name, "{world} {axes:?}");
    }
    let error = Mesh::new(8, &[Expert.of_size(4), Data.of_size(3)]).unwrap_err().to_string();
    assert!(error.contains("expert 4 x data 3 = 12") && error.contains("product of 8"), "{error}");
    let mesh = Mesh::new(8, &[Expert.of_size(8)]).unwrap();
    assert!(mesh.member(Expert, 8).is_err() && mesh.coordinate(Data, 8).is_err());
}
