/* What the files that carry out operations share. Operations that touch mounts are in mounts.c, those of access policies in access.c, those that make and enter
 * namespaces in namespaces.c, those that make the sandbox in sandbox.c, the rest and the walk itself in setup.c. */
#ifndef SHOAL_SETUP_H
#define SHOAL_SETUP_H

#include "init.h"

int setup_fail(struct setup *s, int error, const char *detail); /* the same error, with what the kernel had to say */
int read_fd(struct setup *s);                                   /* AT_FDCWD for none */
int store_fd(struct setup *s, int64_t reference, int fd);       /* takes fd over; errno of the call that gave -1 */
int write_maps(pid_t pid, const char *uids, const char *gids);
void raise_capabilities(void); /* all that are permitted; changing ids takes the effective ones away */

int op_mount(struct setup *s);
int op_overlay(struct setup *s);
int op_clone_tree(struct setup *s);
int op_idmap(struct setup *s);
int op_attributes(struct setup *s);
int op_attach(struct setup *s);
int op_pivot(struct setup *s);
int op_enter(struct setup *s);
int op_mkdir(struct setup *s);
int op_open(struct setup *s);
int op_write(struct setup *s);
int op_chown(struct setup *s);
int op_remove_tree(struct setup *s);
int op_keep(struct setup *s);
int op_drop(struct setup *s);
int op_send(struct setup *s);
int op_userns(struct setup *s);
int op_netns(struct setup *s);
int op_netlink(struct setup *s);
int op_listen(struct setup *s);
int op_clone(struct setup *s);
int op_identity(struct setup *s);
int op_join(struct setup *s);
int op_unshare(struct setup *s);
int op_hostname(struct setup *s);
int op_rlimit(struct setup *s);
int op_commands(struct setup *s);
int op_capabilities(struct setup *s);
int op_seccomp(struct setup *s);
int op_affinity(struct setup *s);
int op_bind(struct setup *s);
int op_seccomp_audited(struct setup *s);
int op_restrict(struct setup *s);
int op_hide(struct setup *s);
int op_clone_all(struct setup *s);
int op_visit(struct setup *s);
int op_view(struct setup *s);
int op_no_memory_files(struct setup *s);
int op_landlock(struct setup *s);

#endif
