#!/usr/bin/env bash
# The units, fstab and automount under a real systemd.
# shellcheck shell=bash disable=SC2317
. "$LAB_DIR/cases/lib.sh"
work=/dev/shm/work
mkdir -p $work /etc/railfs/mounts /srv/{a,b,fstab,auto}
url=railfs://127.0.0.1/lab
# The installed ones are in memory, and so read faster.
export PATH=/usr/bin:$PATH

property() { systemctl show -P "$2" "$1"; }
is() { [[ $(property "$1" ActiveState) == "$2" ]]; }
mounted() { grep -q " $1 fuse.railfs " /proc/mounts; }
mounts_of() { grep -c " $1 fuse.railfs " /proc/mounts; }
# A unit that ran into its limit of starts begins anew.
forget() { systemctl reset-failed "$@" 2>/dev/null || true; }

mount_file() { # NAME [OPTION LINE...]
  local name=$1
  shift
  printf 'url = "%s/"\nmountpoint = "/srv/%s"\n[options]\narena = "16 MiB"\n' "$url" "$name" >"/etc/railfs/mounts/$name.toml"
  printf '%s\n' "$@" >>"/etc/railfs/mounts/$name.toml"
}

make_install_puts_everything_in_place() {
  # Made by `make install` with DESTDIR on the host (tests/bin/lab.sh).
  cp -a "${RAILFS_BIN_DIR%/usr/bin}/." /
  # A guest's disk work is slow: the store is in memory, which the unit may write to.
  mkdir -p /srv/store
  store /srv/store 127.0.0.1
  sed -i '/^state_dir/d; /^\[security\]/d; /^insecure/d' /srv/store/railfsd.toml
  cp /srv/store/railfsd.toml /etc/railfs/railfsd.toml
  mount_file a
  # Fewer starts that fail than the unit allows: each takes its time here.
  mkdir -p /run/systemd/system/railfs@.service.d
  printf '[Unit]\nStartLimitBurst=2\n' >/run/systemd/system/railfs@.service.d/starts.conf
  systemctl daemon-reload
  [[ -x /usr/bin/railfs && -x /usr/bin/railfsd && -L /sbin/mount.railfs ]]
  for page in railfs.1 railfs-mount.1 railfsd.8 mount.railfs.8 railfs.toml.5 railfsd.toml.5; do
    [[ -s /usr/share/man/man${page##*.}/$page ]]
  done
}

s11_units_verify_and_lift_memlock() {
  local said
  said=$(systemd-analyze verify --man=no railfsd.service railfs@a.service 2>&1)
  say "$said"
  [[ -z $said ]]
  for unit in railfsd.service railfs@a.service; do
    [[ $(property $unit LimitMEMLOCK) == infinity ]]
    [[ $(property $unit PrivateDevices) == no ]]
    [[ $(property $unit After) == *network-online.target* && $(property $unit Wants) == *network-online.target* ]]
  done
}

the_server_is_active_once_it_serves() {
  systemctl start railfsd
  is railfsd active
  head -c 3000001 /dev/urandom >$work/file
  railfs put $work/file $url/file
  railfs ls $url/
  [[ $(property railfsd StatusText) == store* ]]
  # What it must not see or do.
  [[ $(property railfsd NRestarts) == 0 ]]
}

s04_a_dependent_unit_sees_the_files() {
  printf '[Unit]\nRequires=railfs@a.service\nAfter=railfs@a.service\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/bin/cmp %s/file /srv/a/file\n' $work >/run/systemd/system/reader.service
  systemctl daemon-reload
  systemctl start reader.service
  is railfs@a active
  mounted /srv/a
  say "$(property railfs@a StatusText)"
  [[ $(property railfs@a StatusText) == *"rails up"* ]]
}

s08_a_second_start_changes_nothing() {
  local pid
  pid=$(property railfs@a MainPID)
  systemctl start railfs@a
  not railfs mount $url/ /srv/a
  not mount -t railfs $url/ /srv/a
  [[ $(mounts_of /srv/a) == 1 && $(property railfs@a MainPID) == "$pid" ]]
  cmp $work/file /srv/a/file
}

s09_restart_and_reload_keep_the_files() {
  local server
  systemctl reload railfs@a
  cmp $work/file /srv/a/file
  # The server looks at its certificates then: it has none, and goes on as the same process.
  server=$(property railfsd MainPID)
  systemctl reload railfsd
  cmp $work/file /srv/a/file
  [[ $(property railfsd MainPID) == "$server" && $(property railfsd ActiveState) == active ]]
  systemctl restart railfs@a
  [[ $(mounts_of /srv/a) == 1 ]]
  cmp $work/file /srv/a/file
}

s09_a_killed_daemon_is_started_again_over_its_dead_mount() {
  local pid
  # The starts of the cases before this one do not count.
  forget railfs@a
  pid=$(property railfs@a MainPID)
  kill -9 "$pid"
  within 40 eval "[[ \$(property railfs@a MainPID) != $pid ]] && is railfs@a active"
  [[ $(mounts_of /srv/a) == 1 ]]
  cmp $work/file /srv/a/file
}

s09_a_stop_with_readers_waiting_ends_in_time() {
  local server began
  forget railfs@a
  systemctl start railfs@a
  server=$(property railfsd MainPID)
  exec 9</srv/a/file
  (cd /srv/a && exec sleep 300) &
  local inside=$!
  kill -STOP "$server"
  dd if=/srv/a/file of=/dev/null bs=64k iflag=direct status=none &
  local reader=$!
  within 10 eval "grep -q '^fuse\|request_wait' /proc/$reader/wchan || grep -q 'State:.[SD]' /proc/$reader/status"
  began=$SECONDS
  systemctl stop railfs@a
  say "stopped after $((SECONDS - began)) s"
  ((SECONDS - began <= 20))
  not mounted /srv/a
  is railfs@a inactive
  [[ $(property railfs@a Result) == success ]]
  kill -CONT "$server"
  kill $inside $reader 2>/dev/null || true
  exec 9<&-
}

s04_a_server_that_is_down_makes_the_unit_fail() {
  local states=$work/states
  systemctl stop railfsd
  forget railfs@a
  systemctl start --no-block railfs@a
  : >$states
  within 90 eval "property railfs@a ActiveState >>$states; is railfs@a failed"
  not grep -qx active $states
  not mounted /srv/a
  [[ -z $(ls -A /srv/a) ]]
}

s09_no_dead_mount_is_left_when_a_crashed_daemon_cannot_come_back() {
  systemctl start railfsd
  forget railfs@a
  systemctl start railfs@a
  systemctl stop railfsd
  kill -9 "$(property railfs@a MainPID)"
  within 90 is railfs@a failed
  not mounted /srv/a
  [[ -z $(ls -A /srv/a) ]]
}

s04_a_late_server_is_waited_for_with_retry() {
  mount_file b 'retry = "2 min"'
  systemctl start --no-block railfs@b
  within 30 is railfs@b activating
  within 30 eval "[[ \$(property railfs@b StatusText) == *again* ]]"
  systemctl start railfsd
  within 60 is railfs@b active
  cmp $work/file /srv/b/file
  [[ $(property railfs@b NRestarts) == 0 ]]
  systemctl stop railfs@b
}

s09_the_watchdog_ends_a_daemon_that_hangs() {
  local pid
  mkdir -p /run/systemd/system/railfs@a.service.d
  printf '[Service]\nWatchdogSec=6s\nTimeoutAbortSec=5s\n' >/run/systemd/system/railfs@a.service.d/watchdog.conf
  systemctl daemon-reload
  forget railfs@a
  systemctl start railfs@a
  pid=$(property railfs@a MainPID)
  # It is fed, and for longer than the limit.
  within 60 eval "((\$(property railfs@a WatchdogTimestampMonotonic) > $(property railfs@a ActiveEnterTimestampMonotonic) + 7000000))"
  [[ $(property railfs@a MainPID) == "$pid" ]]
  kill -STOP "$pid"
  within 60 eval "[[ \$(property railfs@a MainPID) != $pid ]] && is railfs@a active"
  cmp $work/file /srv/a/file
  systemctl stop railfs@a
  rm -r /run/systemd/system/railfs@a.service.d
  systemctl daemon-reload
}

s19_a_typing_error_in_the_file_is_named_and_not_tried_again() {
  mount_file b 'arean = "1 GiB"'
  not systemctl start railfs@b
  is railfs@b failed
  [[ $(property railfs@b NRestarts) == 0 ]]
  journalctl -u railfs@b -o cat | grep -F '/etc/railfs/mounts/b.toml:5: options.arean: there is no such option; did you mean options.arena?'
  forget railfs@b
}

s04_lines_of_fstab_mount() {
  printf '%s\n' "$url/ /srv/fstab railfs _netdev,nofail,noatime,arena=16MiB 0 0" >/etc/fstab
  systemctl daemon-reload
  mount /srv/fstab
  cmp $work/file /srv/fstab/file
  mount -a
  [[ $(mounts_of /srv/fstab) == 1 ]]
  umount /srv/fstab
  not mounted /srv/fstab
  # As the unit that systemd makes of the line.
  systemctl start srv-fstab.mount
  cmp $work/file /srv/fstab/file
  systemctl stop srv-fstab.mount
  not mounted /srv/fstab
  mount -t railfs $url/ /srv/fstab -o ro,_netdev,nofail,noatime,x-systemd.automount
  umount /srv/fstab
  not mount -t railfs $url/ /srv/fstab -o arean=1GiB
  mount -f -t railfs $url/ /srv/fstab
  not mounted /srv/fstab
}

s04_the_first_access_mounts() {
  printf '%s\n' "$url/ /srv/auto railfs noauto,_netdev,nofail,x-systemd.automount,arena=16MiB 0 0" >/etc/fstab
  systemctl daemon-reload
  systemctl start srv-auto.automount
  not mounted /srv/auto
  timeout 60 cmp $work/file /srv/auto/file
  mounted /srv/auto
  systemctl stop srv-auto.mount
  not mounted /srv/auto
  timeout 60 cmp $work/file /srv/auto/file
  systemctl stop srv-auto.automount
  not mounted /srv/auto
  : >/etc/fstab
  systemctl daemon-reload
}

s09_the_server_stops_and_nothing_is_left() {
  systemctl stop railfsd
  is railfsd inactive
  [[ $(property railfsd Result) == success ]]
  not grep -q fuse.railfs /proc/mounts
  within 10 not pgrep -x railfs
  not pgrep -x railfsd
  [[ -z $(ls -A /run/railfs 2>/dev/null) ]]
}

for test in make_install_puts_everything_in_place s11_units_verify_and_lift_memlock the_server_is_active_once_it_serves \
  s04_a_dependent_unit_sees_the_files s08_a_second_start_changes_nothing s09_restart_and_reload_keep_the_files \
  s09_a_killed_daemon_is_started_again_over_its_dead_mount s09_a_stop_with_readers_waiting_ends_in_time \
  s04_a_server_that_is_down_makes_the_unit_fail s09_no_dead_mount_is_left_when_a_crashed_daemon_cannot_come_back \
  s04_a_late_server_is_waited_for_with_retry s09_the_watchdog_ends_a_daemon_that_hangs \
  s19_a_typing_error_in_the_file_is_named_and_not_tried_again s04_lines_of_fstab_mount s04_the_first_access_mounts \
  s09_the_server_stops_and_nothing_is_left; do
  try $test $test
done
journalctl -o short-monotonic --no-hostname >"$LAB_OUT/journal" 2>&1
status_of_cases
